"""Reports that people read: html, json and pictures. Knows the numbers (actions/), not where they come from."""
