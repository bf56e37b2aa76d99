"""Parsers turn the text of one file into records. `sources.layout` finds the files of a chain.

A parser takes the path and, optionally, the file's bytes if they were read already (from an alignment database); the path
then only names the file in messages. A malformed file is a FileFormatError with file and line.
"""

from evodsp.data.formats.alignments import parse_a3m, parse_complex_a3m, parse_stockholm, query_of_complex
from evodsp.data.formats.fasta import SUBSTITUTES, FastaRecord, check_name, parse_fasta, read_fasta, read_sequence_table
from evodsp.data.formats.preparsed import parse_preparsed
from evodsp.data.formats.template_hits import parse_hhr, parse_hmmsearch, parse_obsolete

PARSERS = {".a3m": parse_a3m, ".sto": parse_stockholm}
"""The parsers of alignments by suffix: training, prediction, the index and alignment databases read files of these suffixes,
gzipped or not. A parser takes the path and, where they are read already, the file's bytes, and returns an `Alignment`."""

__all__ = [
    "PARSERS",
    "SUBSTITUTES",
    "FastaRecord",
    "check_name",
    "parse_a3m",
    "parse_complex_a3m",
    "parse_fasta",
    "parse_hhr",
    "parse_hmmsearch",
    "parse_obsolete",
    "parse_preparsed",
    "parse_stockholm",
    "query_of_complex",
    "read_fasta",
    "read_sequence_table",
]
