"""Templates: `hits` (the record of a hit) -> `filters` -> `matching` (its residues in a structure) -> `build` -> `features`.

`source` does all of it for one query; `dates` reads the option that limits release dates.
"""
