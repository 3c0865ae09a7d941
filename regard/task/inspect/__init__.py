"""A trained model looked into: what it attended to, with something changed inside if one likes.

    view(load("run"), text="A dog runs.")             a View of any task's model
    translated(translator, text, Changes(off=[…]))    a translation made again, and its beam tree

Every number is of the one text or image that is shown. Weights are those with which the text was
written: the model is given it again, all at once, which makes the same weights as the search made
step by step.

changes.py       what is changed, and what each head does for the answer
translation.py   translators
images.py        image classifiers and readers
texts.py         language models, text classifiers and encoders of text
views.py         any of them, by what a model was trained for; the numbers of one head
"""
