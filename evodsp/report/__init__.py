"""Reports as self-contained HTML pages: no network, no scripts, readable on light and dark screens."""
