"""`method: auto`: bits and method of each layer, from a measured sensitivity and a budget."""
