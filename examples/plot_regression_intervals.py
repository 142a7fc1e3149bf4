"""
Regression with proved intervals
================================

If an input changes by at most a given distance, the answer of a defended regressor is proved to
stay in an interval. Here a regressor learns a simulator with five inputs from 540 of its runs. We
compare the intervals with attacks on the regressor and on the network alone.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split

import otad

plt.style.use("otad.report.gallery")

# %%
# Friedman's function plays the part of the simulator. A global map has the same Lipschitz constant
# for all inputs, which makes its intervals short; all other settings are the defaults.
X, y = make_friedman1(600, 5, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=60, random_state=0)
reg = otad.OTADRegressor(scope="global", epochs=20, random_state=0).fit(X_train, y_train)
print(f"R2 on {len(X_test)} test runs: {reg.score(X_test, y_test):.3f}")

# %%
# The intervals hold for every change of l2 length 0.1 or less, whatever the attack. Changes are
# measured in standard deviations of each feature.
eps, unit = 0.1, X_train.std(0)
proved = reg.certify(X_test, eps, unit=unit)
low, high = proved.low.numpy(), proved.high.numpy()
print(proved)

# %%
# Attacks look for the largest error within the same distance. The network has smaller errors than
# the defended regressor, with and without attack, but nothing is proved about its answers.
ball = otad.L2(eps, scale=torch.tensor(unit).float())
found = otad.evaluate(reg, X_test, y_test, ball, attacks=[otad.attacks.Pgd(steps=20)], flags=False)
for name, one in (("undefended", found.undefended), ("defended", found)):
    errors = np.mean(one.clean_errors), np.mean(one.worst_errors())
    print(f"{name:11} mean error {errors[0]:.2f} clean, {errors[1]:.2f} attacked", end=", ")
    known = one.certificate and f"at most {np.mean(one.certificate.worst_errors):.2f} proved"
    print(known or "nothing proved")
bounded = np.isfinite(high - low).mean()
print(f"gain: {bounded:.0%} of the answers are bounded by proof, of the network none")

# %%
# Each line is a test run, with its proved interval, the prediction, and the value of the simulator.
# The interval says how far an attacker can move the prediction. It says nothing about the true
# value.
predicted = reg.predict(X_test)
order, place = np.argsort(predicted), np.arange(len(predicted))
figure, panel = plt.subplots()
panel.vlines(place, low[order], high[order], color="#0f766e", lw=5, alpha=0.35, label="proved")
panel.plot(place, predicted[order], ".", color="#0f766e", label="prediction")
panel.plot(place, y_test[order], "x", ms=5, color="#e05a33", label="simulator")
panel.set(title=f"Every answer within l2 {eps:g} is in these intervals")
panel.set(xlabel="test runs, by prediction", ylabel="value")
panel.legend(ncols=3, loc="upper left")
