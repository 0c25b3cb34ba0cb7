"""Where an object lives. Layer 3: imports protocols only, and is imported by the wiring alone."""
