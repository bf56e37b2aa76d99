"""The DSP paper (arXiv 2403.10266): its transformer, and the ways to spread it over ranks that the paper compares."""
