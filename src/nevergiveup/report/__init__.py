"""What a run looks like to a person: while it is running (`live`), and afterwards. Layer 3."""
