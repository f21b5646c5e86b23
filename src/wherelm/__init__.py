"""wherelm: small language models on messages, and which position scheme works for them."""
