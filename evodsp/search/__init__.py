"""Alignments for sequences that have none: from a server with ColabFold's protocol, or by programs of this machine."""
