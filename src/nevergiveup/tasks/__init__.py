"""Tasks: prompts and the rule that scores a completion, one module each. Layer 3."""
