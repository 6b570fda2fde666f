"""Where the Triton tests run: natively on a GPU, or interpreted on the CPU (TRITON_INTERPRET=1)."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
