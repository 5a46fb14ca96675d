"""OpenAI's Responses API: `/v1/responses` is translated into a chat request and answered on the same path."""
