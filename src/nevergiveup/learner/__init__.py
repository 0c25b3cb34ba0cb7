"""The learner: from a batch of weighted completions to the next policy version. Layer 3.

`losses` holds the formulas (tensors only); `policy` holds the model, its optimizer and their checkpoints.
"""
