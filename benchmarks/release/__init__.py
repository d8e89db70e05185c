"""`make release-check`: builds the package, and tries it in fresh environments with each extra alone."""
