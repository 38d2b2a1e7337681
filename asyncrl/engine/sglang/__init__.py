"""SGLang's servers with the fleet's protocol."""
