"""Writes families of made-up proteins, or of complexes of them."""

from __future__ import annotations

from collections.abc import Callable

from evodsp.errors import UserError
from scripts.examples.synthetic.config import SynthesisConfig, check_new_folder
from scripts.examples.synthetic.writers import write_families


def synthesize(config: SynthesisConfig, report: Callable[[str], None] | None = None) -> None:
    """Write the families of `config` to the folder `config.output`, in OpenFold's layout:

    `mmcif_files/<id>.cif`, `alignments/<id>_A/{bfd_uniclust_hits.a3m, uniref90_hits.sto}`, `fasta/<id>_A.fasta`,
    `chain_data_cache.json`, `mmcif_cache.json`, `train.txt` and `validation.txt` (chain names; the last `held_out` members of
    each family) and a README.md with the contents and the command. Ids are s001, s002, …. `report` is given a line for
    every chain written.

    With `complexes` an entry is c001, c002, …: `mmcif_files/<id>.cif.gz` has the chains A and B and their assembly 1,
    `alignments/<id>_A/` and `<id>_B/` hold `uniprot_hits.a3m` and `uniref90_hits.sto` (a homodimer's are in `<id>_A/` alone),
    `fasta/<id>.fasta` both sequences with `:` between them, and `train.txt` and `validation.txt` list entries.

    The same config gives the same bytes on one machine. On another machine the last digits of its linear algebra may differ
    and lead the folding elsewhere: families of the same kind, not the same atoms.

    Raises UserError if the output exists and is not an empty folder, if its parent folder does not exist, and if the files
    cannot be written; then nothing is left.
    """
    check_new_folder(config.output)
    try:
        write_families(config, report)
    except OSError as error:
        raise UserError(
            f"{config.output}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error
