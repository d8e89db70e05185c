"""Write the report as one HTML page with SVG charts."""
