# SPDX-License-Identifier: Apache-2.0
# Releases: wheels, packages, and all of it with checksums. Included by the Makefile.
# What builds them is pinned in packaging/requirements.txt and installed into build/.

RELEASE_VENV := $(CURDIR)/build/release-venv

$(RELEASE_VENV)/ready: packaging/requirements.txt
	python3 -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/pip install --quiet --disable-pip-version-check -r packaging/requirements.txt
	touch $@

.PHONY: wheels wheels-test
wheels: $(RELEASE_VENV)/ready ## manylinux wheels for x86-64 and arm64, into dist/
	$(RELEASE_VENV)/bin/python packaging/wheels.py dist

wheels-test: wheels ## the wheels in fresh environments of every CPython at hand, without compilers
	./packaging/wheels_test.sh dist
