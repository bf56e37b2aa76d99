"""AlphaFold2's MSA features, made on the training device from what workers hand over (`evodsp.data.raw_features`).

The same random numbers and the same bits as `evodsp.data.features`, which makes them with NumPy for prediction; floats agree to
1e-6. No operator makes the host wait: the sizes of all results are known to it.
"""
