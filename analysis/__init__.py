"""From run records to tables, plots and a report. Reads records and the published numbers only."""
