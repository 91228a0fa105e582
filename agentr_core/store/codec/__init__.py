"""Domain records to rows and back. A function `*_rows` returns the rows of one unit, for
`Store.write` or `Writer.add`. Functions that take a store raise as `Store.reading` does or, if they
write, as `Store.transaction`.
"""
