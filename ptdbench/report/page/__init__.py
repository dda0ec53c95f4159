"""The report as one HTML file: the figures of records as data, and the scripts that draw them in a browser.

Python computes and JavaScript displays: :mod:`ptdbench.report.page.document` creates the data, figures of records and
sentences about them, and puts them into one file that needs no network, together with the scripts in this folder,
which filter, sort and draw with plotly.
"""
