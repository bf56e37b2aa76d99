"""Data: files on disk -> records -> samples, as workers hand them over.

`formats/` reads one file into records. `sources/` finds the files of chains and joins what they hold. `templates/` makes
templates of the hits of a chain. `complexes/` pairs and merges the MSAs of several chains. `index/`, `doctor/`, `build` and
`fetch` hold the commands of `evodsp data`. `samples/` decides which chains are drawn, and makes samples of them.
"""
