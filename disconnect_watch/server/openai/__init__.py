"""OpenAI's endpoints, on any backend that generates text and any encoder that makes vectors."""
