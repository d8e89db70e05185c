"""The report as one HTML page with SVG charts."""
