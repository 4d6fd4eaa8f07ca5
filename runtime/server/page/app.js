// The chat. No library, no storage of what is said; the key stays in this tab.

import { Monitor } from "./chart.js";

const at = (id) => document.getElementById(id);
const chat = [];
let running = null;

function headers() {
  const key = at("key").value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

function show(role, text) {
  at("empty").hidden = true;
  const box = document.createElement("div");
  box.className = "message " + role;
  const body = document.createElement("span");
  body.textContent = text;
  const note = document.createElement("span");
  note.className = "note";
  box.append(body, note);
  at("messages").append(box);
  scrollDown(true);
  return { box, body, note };
}

function scrollDown(always) {
  const list = at("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (always || near) list.scrollTop = list.scrollHeight;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "the server answered " + answer.status;
  }
}

function question() {
  const system = at("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat],
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("max-tokens").value) || 512,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function ask(text) {
  chat.push({ role: "user", content: text });
  show("user", text);
  const { box, body, note } = show("assistant", "");
  running = new AbortController();
  busy(true);
  const began = performance.now();
  let said = "", reason = "", usage = null, first = null;
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(question()),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error(await errorOf(answer));
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      for (const choice of chunk.choices) {
        if (choice.delta.content) {
          first = first || performance.now();
          said += choice.delta.content;
          body.textContent = said;
          scrollDown(false);
        }
        reason = choice.finish_reason || reason;
      }
    }
  } catch (fault) {
    if (fault.name === "AbortError") reason = "stopped";
    else {
      reason = "error";
      box.classList.add("fault");
      body.textContent = said + (said ? "\n" : "") + fault.message;
    }
  }
  if (reason === "error" && !said) chat.pop();
  else chat.push({ role: "assistant", content: said });
  note.textContent = describe(reason, usage, began, first);
  running = null;
  busy(false);
}

function describe(reason, usage, began, first) {
  const parts = [];
  if (first) parts.push(`first text after ${((first - began) / 1000).toFixed(2)} s`);
  if (usage && first) {
    const seconds = (performance.now() - first) / 1000;
    const count = usage.completion_tokens;
    parts.push(`${count} tokens`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(0)} tok/s`);
  }
  if (reason && reason !== "stop") parts.push("ended by: " + reason);
  return parts.join(" · ");
}

function busy(is) {
  at("send").disabled = is;
  at("stop").disabled = !is;
  if (!is) at("input").focus();
}

function stop() {
  if (running) running.abort();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("input").value.trim();
  if (!text || running) return;
  at("input").value = "";
  ask(text);
});
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", () => {
  stop();
  chat.length = 0;
  document.querySelectorAll(".message").forEach((box) => box.remove());
  at("empty").hidden = false;
  at("input").focus();
});
at("settings-button").addEventListener("click", () => {
  const open = at("settings").hidden;
  at("settings").hidden = !open;
  at("settings-button").setAttribute("aria-expanded", String(open));
  if (open) at("key").focus();
});
at("key").value = sessionStorage.getItem("llmopt-key") || "";
at("key").addEventListener("change", () => {
  sessionStorage.setItem("llmopt-key", at("key").value.trim());
  names();
});

function theme(name) {
  document.documentElement.dataset.theme = name;
  monitor.redraw();
}

const monitor = new Monitor(headers, (text, fault) => {
  at("state").textContent = text;
  at("state").dataset.fault = String(fault);
});
const dark = window.matchMedia("(prefers-color-scheme: dark)");
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
at("theme").addEventListener("click", () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
});

async function names() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) return;
    const [model] = (await answer.json()).data;
    at("model").textContent = model.id;
    if (model.max_model_len) {
      const field = at("max-tokens");
      if (!field.max) field.value = Math.min(512, Math.ceil(model.max_model_len / 4));
      field.max = model.max_model_len;
    }
  } catch {
    at("model").textContent = "";
  }
}

names();
monitor.start();
