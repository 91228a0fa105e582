"""Domain records to rows and back. A function `*_rows` returns one unit for `Store.write` or
`Writer.add`. What takes a store raises as `Store.reading` does, or `Store.transaction`.
"""
