"""SGLang's servers, as the fleet sees them."""
