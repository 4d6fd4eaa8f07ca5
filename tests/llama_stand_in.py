"""A stand-in for llama-server, for tests of what asks one."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from .gguf_models import save_family

STAND_IN = '''
"""Speaks llama-server's protocol; the next token after t is (3 t + 7) modulo 600, but what is forced; 9 is its end.
Prompts that begin with 13, 14 and 15 have it end, refuse, and wait until the client has left."""
import json, math, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def reply(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self): self.reply({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer " + os.environ["LLAMA_API_KEY"]:
            return self.reply({"error": {"message": "no key"}}, 401)
        if asked["prompt"][0] == 13: os._exit(3)
        if asked["prompt"][0] == 15: return self.connection.recv(1)
        if asked["prompt"][0] == 14: return self.reply({"error": {"message": "unlucky"}}, 400)
        ids, out, probabilities = list(asked["prompt"]), [], []
        bias = dict(map(tuple, asked["logit_bias"]))
        for _ in range(asked["n_predict"]):
            forced = [t for t, b in bias.items() if b is not False and b > 100]
            token = forced[0] if forced else (3 * ids[-1] + 7) % 600
            while bias.get(token) is False: token += 1
            out.append(token); ids.append(token)
            top = [{"id": (3 * ids[-2] + 7) % 600, "logprob": -0.5}, {"id": 11, "logprob": -2.0}]
            own = dict((t["id"], t["logprob"]) for t in top).get(token, -3.0)
            if token != 12: probabilities.append({"id": token, "logprob": own, "top_logprobs": top})
            if token == 9: break
        self.reply({"tokens": out, "completion_probabilities": probabilities, "slot": asked["id_slot"]})

port = int(sys.argv[sys.argv.index("--port") + 1])
if "broken" in sys.argv[sys.argv.index("-m") + 1]:
    print("error: broken model"); sys.exit(1)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


def follow(token: int, count: int) -> list[int]:
    out = []
    for _ in range(count):
        token = (3 * token + 7) % 600
        out.append(token)
    return out


def write_program(folder: Path) -> Path:
    """The stand-in as a program."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -S\n{textwrap.dedent(STAND_IN)}", encoding="utf-8")
    path.chmod(0o755)
    return path


def write_folder(folder: Path) -> Path:
    """Config and tokenizer of a tiny model beside a file that the stand-in does not read."""
    path = save_family("qwen3", folder / "model", eos_token_id=599)
    (path / "model.safetensors").unlink()
    (path / "model.gguf").write_bytes(b"GGUF")
    return path
