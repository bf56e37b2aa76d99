"""evodsp: train and run AlphaFold2-style Evoformer models, one sample spread over many GPUs (DSP)."""

__version__ = "0.1.0"
