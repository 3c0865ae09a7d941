"""Homework 4, Transformer: five theoretical sections and a program."""
