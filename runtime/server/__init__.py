"""`llmopt serve`: an OpenAI-compatible HTTP server over the engine. Needs the extra `serve`."""
