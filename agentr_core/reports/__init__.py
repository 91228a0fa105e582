"""Reports as pages and tables: plain records in, HTML and Markdown out."""
