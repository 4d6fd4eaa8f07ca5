"""The recipes that ship with llmopt, as package data."""
