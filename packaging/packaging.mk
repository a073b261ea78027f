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

.PHONY: packages packages-test release reproducible
packages: $(RELEASE_VENV)/ready ## .deb, .rpm and the bare command for amd64 and arm64, into dist/
	./packaging/packages.sh dist

packages-test: wheels ## the packages installed, upgraded under load and purged in a Debian of their own; root only
	@command -v debootstrap >/dev/null && command -v rpm >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap rpm; } || { echo "install debootstrap and rpm first"; exit 1; }
	./packaging/packages_test.sh

release: $(RELEASE_VENV)/ready ## everything that people download, with checksums, into dist/
	./packaging/release.sh

reproducible: ## the release once more, in another folder: the same bytes (after make release)
	./packaging/reproducible.sh
