"""Templates: `hits` (the record of a hit) -> `filters` -> `matching` (its residues in a structure) -> `build` -> `features`.

`source` does all of it for one query; `template_chains` finds hits without a search program; `dates` reads the option that
limits release dates.
"""
