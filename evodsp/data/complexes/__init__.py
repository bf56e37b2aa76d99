"""MSAs of complexes: rows of different chains are paired, and the MSAs of all chains become one.

`keys` says which rows belong together, `pairing` pairs them, `entities` groups identical chains, and `merging` puts the MSAs
side by side: functions on arrays and names. `source` reads the files.
"""
