"""The documentation site: what mkdocs needs beside the pages of docs/, and the notebooks' check."""
