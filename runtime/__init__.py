"""The runtime: opens artifacts and generates text from them."""
