"""Use trained models: python examples/use_a_run.py TRANSLATOR CLASSIFIER PICTURE"""

import sys

import regard
from regard import Classifier, Translator

run, other, picture = sys.argv[1:4]
predictor = regard.load(run)
print(predictor)
print(predictor.translate(["A dog.", "Two cats.\nA bird."]))

translator = Translator.load(run)
print(translator("A dog."))
for best in translator.translations(["A dog."], n_best=2, attention=True):
    print(best)

classifier = Classifier.load(other, device="cpu")
label = classifier(picture)
probability = classifier.probabilities([picture])[0, classifier.labels.index(label)]
print(f"{label} {float(probability):.2f}")
