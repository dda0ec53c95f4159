"""The report as one HTML file: the figures of records as data, and what draws them in a browser.

Python says what is true and JavaScript shows it: :mod:`ptdbench.report.page.document` makes the data, which holds
figures of records and sentences about them, and puts it into one file that needs no network, with the scripts beside
it, which filter, sort and draw with plotly.
"""
