"""Runs whose scores can be compared with published ones, each with one command.

regard recipes                                          what there is
regard train --recipe multi30k-en-de RUN --data FOLDER  trains, and evaluates the test sets once
"""
