"""The studio: pages that show attention by hand and inside one's own models, served on loopback.

server.py   HTTP: a fixed table of files, and questions in JSON
runs.py     which runs there are; a request names one, and never a path
ask.py      what a page may ask, and who answers
static/     the pages: ES modules without a build step, and no request beyond this server
"""
