"""What a start checks and prepares before it starts any process: every refusal comes here, while it is cheap."""
