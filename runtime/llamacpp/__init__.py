"""GGUF models on llama.cpp: a llama-server process on a loopback port, and the backend that asks it."""
