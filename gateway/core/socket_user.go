// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Peer is the other end of a connection.
type Peer struct {
	local, Remote netip.AddrPort

	asked  sync.Once
	userID uint32
	idErr  error
}

func (p *Peer) isLocal() bool { return p.Remote.Addr().Unmap().IsLoopback() }

// uid returns the owner of a local peer's socket.
func (p *Peer) uid() (uint32, error) {
	p.asked.Do(func() { p.userID, p.idErr = socketUser(p.Remote, p.local) })
	return p.userID, p.idErr
}

// socketUser looks up the owner of a local TCP socket in the kernel's tables.
func socketUser(local, remote netip.AddrPort) (uint32, error) {
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		uid, err := findSocket(table, local, remote)
		if err == nil || !errors.Is(err, errNoSocket) {
			return uid, err
		}
	}
	return 0, errNoSocket
}

var (
	errNoSocket     = errors.New("the kernel does not list its socket")
	errClosedSocket = errors.New("its socket is closed")
)

func findSocket(table string, local, remote netip.AddrPort) (uint32, error) {
	f, err := os.Open(table)
	if errors.Is(err, os.ErrNotExist) { // no IPv6
		return 0, errNoSocket
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 {
			continue
		}
		l, err1 := tableAddress(fields[1])
		r, err2 := tableAddress(fields[2])
		if err1 != nil || err2 != nil || l != unmapped(local) || r != unmapped(remote) {
			continue
		}
		// The kernel lists a closed socket under user 0. A caller must not become
		// root by hanging up.
		if fields[9] == "0" {
			return 0, errClosedSocket
		}
		uid, err := strconv.ParseUint(fields[7], 10, 32)
		return uint32(uid), err
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, errNoSocket
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// tableAddress reads 0100007F:1F40: little-endian words, and the port.
func tableAddress(text string) (netip.AddrPort, error) {
	host, port, ok := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	if !ok || err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("address %q", text)
	}
	for i := 0; i < len(raw); i += 4 {
		raw[i], raw[i+1], raw[i+2], raw[i+3] = raw[i+3], raw[i+2], raw[i+1], raw[i]
	}
	addr, ok := netip.AddrFromSlice(raw)
	n, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %q", text)
	}
	return unmapped(netip.AddrPortFrom(addr, uint16(n))), nil
}

// Caller is a connection with its identity.
type Caller struct {
	*Peer
	identity string // a token's or a certificate's name; may be empty
	Use      *Usage
}

type owner struct {
	identity string
	uid      uint32
}

func (c *Caller) owner(uid uint32) owner { return owner{c.identity, uid} }
