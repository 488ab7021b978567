"""An HTTP server that speaks OpenAI's completions protocol."""
