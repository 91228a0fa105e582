"""What training sees: identity of samples, rendering and loss masks, filters, datasets, files in
and out.
"""
