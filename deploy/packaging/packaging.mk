# SPDX-License-Identifier: Apache-2.0
# Releases: wheels, packages, and all of it with checksums. Included by the Makefile.
# deploy/packaging/requirements.txt pins the build tools, which are installed into build/.

RELEASE_VENV := $(CURDIR)/build/release-venv

$(RELEASE_VENV)/ready: deploy/packaging/requirements.txt
	python3 -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/pip install --quiet --disable-pip-version-check -r deploy/packaging/requirements.txt
	touch $@

.PHONY: wheels wheels-test
wheels: $(RELEASE_VENV)/ready ## manylinux wheels for x86-64 and arm64, into dist/
	$(RELEASE_VENV)/bin/python deploy/packaging/wheels.py dist

# the wheels in fresh environments of every CPython at hand, without compilers
wheels-test: wheels
	./deploy/packaging/wheels_test.sh dist

# the package, built from source by the oldest and the newest CPython at hand, and used by all
.PHONY: pythons
pythons:
	./deploy/packaging/wheels_test.sh

.PHONY: packages packages-test release reproducible
packages: $(RELEASE_VENV)/ready ## .deb, .rpm and the bare command for amd64 and arm64, into dist/
	./deploy/packaging/packages.sh dist

# the packages installed, upgraded under load and purged in a fresh Debian; root only
packages-test: wheels
	@command -v debootstrap >/dev/null && command -v rpm >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap rpm; } \
	  || { echo "install debootstrap and rpm first"; exit 1; }
	./deploy/packaging/packages_test.sh

release: $(RELEASE_VENV)/ready ## everything that people download, with checksums, into dist/
	./deploy/packaging/release.sh

# the release once more, in another folder: the same bytes (after make release)
reproducible:
	./deploy/packaging/reproducible.sh
