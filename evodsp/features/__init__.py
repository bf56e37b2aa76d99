"""AlphaFold2's MSA features, made on any device from the samples that workers hand over (`evodsp.data.samples.raw_features`).

All random numbers have addresses, so they are the same on every device. No operator makes the host wait: the sizes of all
results are known to it.
"""
