// SPDX-License-Identifier: Apache-2.0

// Package configfile reads the broker's configuration file (TOML).
package configfile

import (
	"fmt"
	"maps"
	"math"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// The configuration file, see docs/configuration.md:
//
//	socket = "/run/ringbatch/broker.sock"
//
//	[[model]]
//	name = "resnet50"
//	inputs = ["x:f32[3,224,224]"]
//	outputs = ["y:f32[1000]"]
//	max_batch_size = 32
//	wait_time = "5ms"
//
//	idle = "10m"
//
//	[[model.worker]]
//	command = ["ringbatch", "torch", "resnet50.jit"]
//	instances = [1, 3]
//	gpus = [0]
//	memory = "6GiB"
//
//	[[model]] # a pipeline
//	name = "ocr"
//	inputs = ["image:u8[224,224,3]"]
//	[[model.stage]]
//	name = "detect"
//	inputs = ["image"]
//	outputs = ["boxes:f32[16,4]"]
//	max_batch_size = 8
//	[[model.stage.worker]]
//	command = ["python3", "detect.py"]
//
//	[alias]
//	resnet = "resnet@2"
//	bert = { "bert@1" = 90, "bert@2" = 10 }
//
//	[gateway]
//	http = 8000
type file struct {
	Socket     string        `toml:"socket"`
	AllowUIDs  []int         `toml:"allow_uids"`
	Allow      []fileGrant   `toml:"allow"`
	OpenFolder bool          `toml:"open_folder"`
	DrainTime  *fileDuration `toml:"drain_time"`
	MaxClients fileCount     `toml:"max_clients"`
	Loops      fileCount     `toml:"loops"`

	UserShare         fileCount `toml:"user_share"`
	MaxProcessClients fileCount `toml:"max_process_clients"`
	MaxUserModels     fileCount `toml:"max_user_models"`
	MaxUserSlots      fileCount `toml:"max_user_slots"`
	MaxUserBytes      int64     `toml:"max_user_bytes"`

	GPUs    []fileGPU    `toml:"gpu"`
	MPS     bool         `toml:"mps"`
	Models  []fileModel  `toml:"model"`
	Workers []fileWorker `toml:"worker"`
	Aliases fileAliases  `toml:"alias"`
	Gateway gatewayFlags `toml:"gateway"`
}

type fileGPU struct {
	Number *int      `toml:"number"`
	Memory fileBytes `toml:"memory"` // that workers may take together
}

type fileWorker struct {
	Command          []string          `toml:"command"`
	Instances        fileInstances     `toml:"instances"`
	Memory           fileBytes         `toml:"memory"` // of its GPU
	Spares           int               `toml:"spares"`
	GPUs             []int             `toml:"gpus"`
	Env              map[string]string `toml:"env"`
	ThreadPercentage fileCount         `toml:"thread_percentage"`
	StopTime         *fileDuration     `toml:"stop_time"`
}

func (f *fileWorker) parseWorker() (supervise.Worker, error) {
	w := supervise.Worker{
		Command: f.Command, Instances: f.Instances.fixed, Least: f.Instances.least, Most: f.Instances.most, Memory: int64(f.Memory),
		Spares: f.Spares, GPUs: f.GPUs, Env: f.Env,
		ThreadPercentage: int(f.ThreadPercentage), StopTime: f.StopTime.value(),
	}
	if f.StopTime != nil && w.StopTime == 0 {
		return w, fmt.Errorf("%w: stop_time is 0, must be positive", status.ErrInvalid)
	}
	return w, w.Fill()
}

// fileModel is a model without its policy, whose keys are the rest.
type fileModel struct {
	Name    string       `toml:"name"`
	Inputs  []string     `toml:"inputs"`
	Outputs []string     `toml:"outputs"`
	State   []string     `toml:"state"`
	Memory  string       `toml:"memory"` // the default of all tensors, those of stages, too
	Workers []fileWorker `toml:"worker"`
	Stages  []fileStage  `toml:"stage"`

	Idle *fileDuration `toml:"idle"` // without a request, until the workers end
	Keep bool          `toml:"keep"`
}

// fileStage is a stage of a pipeline without its policy.
type fileStage struct {
	Name    string       `toml:"name"`
	Inputs  []string     `toml:"inputs"`
	Outputs []string     `toml:"outputs"`
	State   []string     `toml:"state"`
	Workers []fileWorker `toml:"worker"`
}

// fileDuration is written "5ms" or as a number of seconds.
type fileDuration time.Duration

func (d *fileDuration) UnmarshalTOML(v any) error {
	t, err := policy.ParseDuration(fmt.Sprint(v))
	*d = fileDuration(t)
	return err
}

func (d *fileDuration) value() time.Duration {
	if d == nil {
		return 0
	}
	return time.Duration(*d)
}

// fileCount is at least 1 in the file: 0 would pass as "default".
type fileCount int

func (c *fileCount) UnmarshalTOML(v any) error {
	n, ok := v.(int64)
	if !ok || n < 1 || n > math.MaxInt32 {
		return fmt.Errorf("%v is not a number of 1 or more", v)
	}
	*c = fileCount(n)
	return nil
}

// fileInstances is a number, or a list of the least and the most.
type fileInstances struct{ fixed, least, most int }

func (f *fileInstances) UnmarshalTOML(v any) error {
	ends, isRange := v.([]any)
	if !isRange {
		var n fileCount
		err := n.UnmarshalTOML(v)
		f.fixed = int(n)
		return err
	}
	if len(ends) == 2 {
		least, ok1 := ends[0].(int64)
		most, ok2 := ends[1].(int64)
		if ok1 && ok2 && least >= 0 && most >= max(least, 1) && most <= math.MaxInt32 {
			f.least, f.most = int(least), int(most)
			return nil
		}
	}
	return fmt.Errorf("%v is neither a number of 1 or more, nor the least and the most, as [1, 4]", v)
}

// fileBytes is written "6GiB" or as a number of bytes.
type fileBytes int64

var byteUnits = []struct {
	name  string
	bytes float64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"", 1}}

func (b *fileBytes) UnmarshalTOML(v any) error {
	text := strings.TrimSpace(fmt.Sprint(v))
	for _, unit := range byteUnits {
		if number, is := strings.CutSuffix(text, unit.name); is {
			n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
			if n *= unit.bytes; err != nil || !(n >= 1 && n < math.MaxInt64/2) {
				break
			}
			*b = fileBytes(n)
			return nil
		}
	}
	return fmt.Errorf("%v is no memory: write it as \"6GiB\", \"500MiB\" or a number of bytes", v)
}

// Load reads a configuration file. Unknown keys are errors: a misspelt
// wait_time must not pass as "default".
func Load(path string) (broker.Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return broker.Config{}, fmt.Errorf("configuration: %w", err)
	}
	cfg, err := Parse(string(text))
	if err != nil {
		return broker.Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return cfg, nil
}

// listError is a plain error for a list that is written as one table, as [model.NAME].
func listError(text string, err error) error {
	var all map[string]any
	if _, bad := toml.Decode(text, &all); bad == nil {
		for _, key := range []string{"model", "worker", "allow", "gpu"} {
			if _, single := all[key].(map[string]any); single {
				return fmt.Errorf("there may be several of %q: begin each with [[%s]], and write its name inside", key, key)
			}
		}
	}
	return err
}

// Parse reads the text of a configuration file.
func Parse(text string) (broker.Config, error) {
	var f file
	meta, err := toml.Decode(text, &f)
	if err != nil {
		return broker.Config{}, fmt.Errorf("%w: %w", status.ErrInvalid, listError(text, err))
	}
	for _, key := range meta.Undecoded() {
		// The rest are settings of a policy, or models of an alias.
		if len(key) < 2 || key[0] != "alias" && key[0] != "model" || isWorkers(key) {
			return broker.Config{}, unknownKey(key)
		}
	}
	var tables struct {
		Models []map[string]any `toml:"model"`
	}
	if _, err := toml.Decode(text, &tables); err != nil {
		return broker.Config{}, fmt.Errorf("%w: %v", status.ErrInvalid, err)
	}
	cfg := broker.Config{
		Socket: f.Socket, AllowedUIDs: f.AllowUIDs, OpenFolder: f.OpenFolder, DrainTime: f.DrainTime.value(),
		MaxClients: int(f.MaxClients), Loops: int(f.Loops), MPS: f.MPS,
		Limits: broker.Limits{
			UserShare: int(f.UserShare), MaxProcessClients: int(f.MaxProcessClients), MaxUserModels: int(f.MaxUserModels),
			MaxUserSlots: int(f.MaxUserSlots), MaxUserBytes: f.MaxUserBytes,
		},
	}
	for _, g := range f.GPUs {
		if g.Number == nil || *g.Number < 0 || g.Memory == 0 || cfg.GPUMemory[*g.Number] != 0 {
			return broker.Config{}, fmt.Errorf("%w: gpu: each [[gpu]] has its own number, 0 or more, and memory, as \"40GiB\"", status.ErrInvalid)
		}
		if cfg.GPUMemory == nil {
			cfg.GPUMemory = map[int]int64{}
		}
		cfg.GPUMemory[*g.Number] = int64(g.Memory)
	}
	for i := range f.Allow {
		g, err := f.Allow[i].parseGrant()
		if err != nil {
			return broker.Config{}, fmt.Errorf("allow: %w", err)
		}
		cfg.Grants = append(cfg.Grants, g)
	}
	if f.DrainTime != nil && cfg.DrainTime == 0 {
		cfg.DrainTime = -1 // 0 would be the default
	}
	for i := range f.Models {
		m, err := f.Models[i].parseModel(tables.Models[i])
		if err != nil {
			return broker.Config{}, fmt.Errorf("model %q: %w", f.Models[i].Name, err)
		}
		cfg.Models = append(cfg.Models, m)
	}
	if cfg.Aliases, err = f.Aliases.parseAliases(); err != nil {
		return broker.Config{}, err
	}
	if cfg.Workers, err = parseWorkers(f.Workers); err != nil {
		return broker.Config{}, err
	}
	if f.Gateway != nil {
		w, err := f.Gateway.process()
		if err != nil {
			return broker.Config{}, fmt.Errorf("gateway: %w", err)
		}
		cfg.Workers = append(cfg.Workers, w)
	}
	return cfg, nil
}

// keysOf lists the keys of a table.
func keysOf[table any]() (keys []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[table]()) {
		keys = append(keys, f.Tag.Get("toml"))
	}
	return keys
}

// ModelKeys are the keys of [[model]] that are not its policy.
func ModelKeys() []string { return keysOf[fileModel]() }

func unknownKey(key toml.Key) error {
	name, known := key[0], keysOf[file]()
	for i, table := range key[:len(key)-1] {
		switch table {
		case "worker":
			name, known = key[i+1], keysOf[fileWorker]()
		case "gpu":
			name, known = key[i+1], keysOf[fileGPU]()
		case "allow":
			name, known = key[i+1], keysOf[fileGrant]()
		}
	}
	return typo.UnknownKey(name, known)
}

// isWorkers says that a key belongs to a model's or stage's worker, which has no policy.
func isWorkers(key toml.Key) bool {
	return key[0] == "model" && (key[1] == "worker" || key[1] == "stage" && len(key) > 2 && key[2] == "worker")
}

func (f *fileModel) parseModel(table map[string]any) (m broker.ModelConfig, err error) {
	m = broker.ModelConfig{Name: f.Name, Idle: f.Idle.value(), Keep: f.Keep}
	if m.Policy, err = settings(table, ModelKeys()); err != nil {
		return m, err
	}
	if f.Idle != nil && m.Idle <= 0 {
		return m, fmt.Errorf("%w: idle is %v, must be positive", status.ErrInvalid, m.Idle)
	}
	if m.Workers, err = parseWorkers(f.Workers); err != nil {
		return m, err
	}
	if f.Memory, err = tensor.ParseMemory(f.Memory); err != nil {
		return m, err
	}
	f.Inputs, f.Outputs = tensor.PlaceTexts(f.Inputs, f.Memory), tensor.PlaceTexts(f.Outputs, f.Memory)
	if len(f.Stages) > 0 {
		return m, f.parseStages(table, &m)
	}
	if m.Signature, err = tensor.ParseSignature(f.Inputs, f.Outputs, tensor.PlaceTexts(f.State, f.Memory)...); err != nil {
		return m, err
	}
	_, err = m.Policy.Resolve(m.Signature.Inputs)
	return m, err
}

func (f *fileModel) parseStages(table map[string]any, m *broker.ModelConfig) (err error) {
	tables, _ := table["stage"].([]map[string]any)
	for i := range f.Stages {
		s := broker.StageConfig{Name: f.Stages[i].Name}
		if s.Policy, err = settings(tables[i], keysOf[fileStage]()); err != nil {
			return fmt.Errorf("stage %q: %w", s.Name, err)
		}
		if s.Workers, err = parseWorkers(f.Stages[i].Workers); err != nil {
			return fmt.Errorf("stage %q: %w", s.Name, err)
		}
		m.Stages = append(m.Stages, s)
	}
	if len(f.State) > 0 {
		return fmt.Errorf("%w: the state of a pipeline belongs to its stages", status.ErrInvalid)
	}
	texts := func(i int) (inputs, outputs, state []string) {
		s := &f.Stages[i]
		return tensor.PlaceTexts(s.Inputs, f.Memory), tensor.PlaceTexts(s.Outputs, f.Memory), tensor.PlaceTexts(s.State, f.Memory)
	}
	if err := m.ParseTensors(f.Inputs, f.Outputs, texts); err != nil {
		return err
	}
	err = m.Check()
	return err
}

func parseWorkers(declared []fileWorker) (list []supervise.Worker, err error) {
	for i := range declared {
		w, err := declared[i].parseWorker()
		if err != nil {
			return nil, err
		}
		list = append(list, w)
	}
	return list, nil
}

// settings are the texts of a model's table, without its own keys. An inner table has parts of a key, as
// [model.buckets]. The tables of [[model.priority]] have the settings of one level each.
func settings(table map[string]any, own []string) (policy.Policy, error) {
	p := policy.Policy{}
	known := append(policy.Names(func(policy.Key) bool { return true }), "priority")
	for _, key := range slices.Sorted(maps.Keys(table)) {
		value := table[key]
		if slices.Contains(own, key) {
			continue
		}
		if base, _, _ := strings.Cut(key, "."); !slices.Contains(known, base) {
			return nil, typo.UnknownKey(key, append(known, own...))
		}
		if key == "priority" {
			if levels, ok := value.([]map[string]any); ok {
				p["priorities"] = strconv.Itoa(len(levels))
				for i, level := range levels {
					for key, value := range level {
						p[fmt.Sprintf("%s.%d", key, i)] = text(value)
					}
				}
				continue
			}
		}
		if parts, ok := value.(map[string]any); ok {
			for part, value := range parts {
				p[key+"."+part] = text(value)
			}
			continue
		}
		p[key] = text(value)
	}
	return p, nil
}

func text(value any) string {
	list, ok := value.([]any)
	if !ok {
		return fmt.Sprint(value)
	}
	texts := make([]string, len(list))
	for i, v := range list {
		texts[i] = fmt.Sprint(v)
	}
	return "[" + strings.Join(texts, ",") + "]" // must not pass as a single value
}
