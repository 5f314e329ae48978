"""The attentions that are compared: a class each, found by name in the registry."""
