"""MSAs of complexes: rows of different chains are paired, and the MSAs of all chains become one.

`pairing` says which rows belong together and pairs them, and `merging` puts the MSAs side by side:
functions on arrays and names. `evodsp.data.sources.opening` reads the files.
"""
