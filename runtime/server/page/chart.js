// Live figures: /metrics is read once a second, and what changed since is drawn.

const POINTS = 120;

export function parseMetrics(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const name = line.slice(0, line.search(/[{ ]/));
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    sums[name] = (sums[name] || 0) + value;
  }
  return sums;
}

class Chart {
  constructor(name, colours, least, format) {
    this.canvas = document.getElementById(name);
    this.output = document.getElementById(name + "-now");
    this.colours = colours;
    this.least = least;
    this.format = format;
    this.series = colours.map(() => []);
  }

  push(values) {
    values.forEach((value, i) => {
      this.series[i].push(value);
      if (this.series[i].length > POINTS) this.series[i].shift();
    });
    this.output.textContent = this.format(values);
    this.draw();
  }

  draw() {
    const box = this.canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(box.width * scale));
    this.canvas.height = Math.max(1, Math.round(box.height * scale));
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const known = this.series.flat().filter((value) => value !== null);
    const top = Math.max(this.least, ...known) * 1.1;
    const width = this.canvas.width;
    const height = this.canvas.height;
    context.clearRect(0, 0, width, height);
    context.lineWidth = scale;
    context.strokeStyle = style.getPropertyValue("--line");
    context.beginPath();
    context.moveTo(0, height - scale);
    context.lineTo(width, height - scale);
    context.stroke();
    this.series.forEach((values, i) => {
      context.lineWidth = 2 * scale;
      context.strokeStyle = style.getPropertyValue(this.colours[i]);
      context.beginPath();
      let open = false;
      values.forEach((value, at) => {
        if (value === null) {
          open = false;
          return;
        }
        const x = ((at + POINTS - values.length) / (POINTS - 1)) * width;
        const y = height - 2 * scale - (value / top) * (height - 4 * scale);
        if (open) context.lineTo(x, y);
        else context.moveTo(x, y);
        open = true;
      });
      context.stroke();
    });
  }
}

const percent = (value) => (value === null ? "–" : (100 * value).toFixed(0) + " %");

export class Monitor {
  constructor(headers, onState) {
    this.headers = headers;
    this.onState = onState;
    this.before = null;
    this.charts = {
      throughput: new Chart("throughput", ["--accent"], 10, ([rate]) => rate.toFixed(0) + " tok/s"),
      requests: new Chart(
        "requests", ["--accent", "--second"], 4, ([running, waiting]) => `${running} running, ${waiting} waiting`),
      cache: new Chart("cache", ["--accent"], 0.05, ([share]) => percent(share)),
      acceptance: new Chart("acceptance", ["--accent"], 1, ([share]) => percent(share)),
    };
    window.addEventListener("resize", () => this.redraw());
  }

  redraw() {
    Object.values(this.charts).forEach((chart) => chart.draw());
  }

  start() {
    this.tick();
    setInterval(() => { if (!document.hidden) this.tick(); }, 1000);
  }

  async tick() {
    try {
      const answer = await fetch("metrics", { headers: this.headers() });
      if (answer.status === 401) return this.onState("API key needed (Settings)", true);
      const ready = await fetch("ready");
      const status = (await ready.json()).status;
      this.onState(status, !ready.ok);
      this.take(parseMetrics(await answer.text()), performance.now() / 1000);
    } catch (fault) {
      this.onState("the server does not answer", true);
    }
  }

  take(now, when) {
    const get = (name) => now["llmopt:" + name] || 0;
    const gained = (name) => (this.before ? get(name) - (this.before.sums["llmopt:" + name] || 0) : 0);
    const seconds = this.before ? when - this.before.when : 1;
    const drafted = gained("spec_decode_num_draft_tokens_total");
    this.charts.throughput.push([Math.max(0, gained("generation_tokens_total")) / seconds]);
    this.charts.requests.push([get("num_requests_running"), get("num_requests_waiting")]);
    this.charts.cache.push([get("kv_cache_usage_perc")]);
    this.charts.acceptance.push([drafted > 0 ? gained("spec_decode_num_accepted_tokens_total") / drafted : null]);
    this.before = { sums: now, when };
  }
}
